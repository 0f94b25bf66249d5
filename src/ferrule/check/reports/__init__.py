"""What was found: findings, which of them are wanted, their reports and formats."""
