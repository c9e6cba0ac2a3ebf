"""What optimizers share: common settings, learning-rate schedules, which parameters weight decay applies to."""
