"""Media that requests name: fetched under the worker's access policy, and read as what they are."""
