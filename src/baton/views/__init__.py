"""The web view of a deployment: finds its processes, collects what they report, and serves it to browsers."""
