"""What tests share: forked ranks, tiny models, laws."""
