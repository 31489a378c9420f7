"""What two runs differ in: `comparing.compare` makes a `Difference`, `writers` show it."""
