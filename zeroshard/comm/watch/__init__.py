"""The watchdog: ranks notice that another rank is lost or late."""
