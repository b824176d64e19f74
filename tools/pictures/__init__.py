"""The pictures of the documentation, drawn as SVG."""
