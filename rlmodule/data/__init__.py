"""Files and tasks -> prompts and samples: rows, chat templates, order. Leaves out who samples and who trains."""
