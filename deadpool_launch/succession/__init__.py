"""What happens when the host of the launcher dies: which launcher leads, and who follows it."""
