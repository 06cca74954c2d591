"""What packages of compiled models say of themselves."""
