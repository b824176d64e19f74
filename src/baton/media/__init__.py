"""Media of requests: fetched under the access policy of the worker, and checked."""
