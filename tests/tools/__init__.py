"""Tools of the tests: equal fakes of the seams, scripted drafters, a history checker, a fault proxy, deployments."""
