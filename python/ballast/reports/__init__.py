"""Reports of a plan: a chart of memory against throughput, and a page with memory and the timeline of a step."""
