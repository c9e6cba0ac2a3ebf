"""Files and rows of environments -> prompts and samples: chat templates, order. Leaves out sampling and training."""
