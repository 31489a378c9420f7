"""What two runs differ in: `comparing.compare` makes a `result.Difference`, `writers` show it."""
