"""What the tests of pages share."""

#: A name that would like to be a program: as HTML, in a template, in JSON, in a chart's text.
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>$title&amp;\u2028%{x}"
#: Three clients with some samples of two classes.
HELD = {"classes": ["cat", "dog"], "counts": [[3, 0], [1, 4], [0, 2]]}
