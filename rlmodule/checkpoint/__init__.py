"""What resumes a run, written so that a half-written or damaged checkpoint is never taken for a whole one."""
