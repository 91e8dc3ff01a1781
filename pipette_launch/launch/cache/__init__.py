"""Plans and measurements kept from job to job."""
