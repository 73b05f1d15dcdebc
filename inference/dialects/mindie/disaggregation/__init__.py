"""MindIE's instances with roles (`inferMode` dmi): one prefills a prompt, another one decodes."""
