"""`lastcall doctor`: what will happen here when this machine is preempted. It measures and changes
nothing."""
