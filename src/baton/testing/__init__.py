"""Contract suites and fakes, shipped so that authors of engines and runtimes can prove their own."""
