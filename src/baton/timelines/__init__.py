"""Timelines: the phases of each request in this process, in a bounded ring that the system server and the edge show."""
