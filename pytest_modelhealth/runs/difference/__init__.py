"""What two runs differ in: `comparing.compare` makes a `result.Difference`, `formats` show it."""
