"""`lastcall doctor`: what will happen here when the machine is taken away. It looks and measures, and changes nothing."""
