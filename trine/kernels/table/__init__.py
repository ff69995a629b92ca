"""Operations on the device table: one backend a file, `base` is the contract."""
