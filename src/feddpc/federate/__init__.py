"""A federation of real processes: keys and certificates, a SuperLink, SuperNodes, an app, and their orderly end.

Flower itself is only ever run as a program here, never imported, so that this package loads without it.
"""
