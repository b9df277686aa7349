"""Client side: the LightningModule, the tasks clients run, and who runs them (this process or Ray actors)."""
