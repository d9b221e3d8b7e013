"""Files on disk: headers, index, ranges, writers. No torch, no tensor names of a model."""
