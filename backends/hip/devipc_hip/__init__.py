"""HIP backend of devipc. Importing it loads no driver and no binding."""
