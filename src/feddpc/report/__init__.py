"""What a run says when it is over: tables, figures, pages."""
