"""What happens between a notice and a committed checkpoint. Knows no framework; `session` alone knows the
order of the stages."""
