"""A federation of real processes: keys and certificates, a SuperLink, SuperNodes, an app, and a clean shutdown.

This package runs Flower as a program and never imports it, so that it loads without Flower.
"""
