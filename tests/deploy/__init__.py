"""The files of deploy/, rendered and checked without a cluster."""
