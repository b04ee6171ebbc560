"""ms-swift's paths of the commands on Megatron-Core, megaswift's default engine."""
