"""Print the installed recur's run-time dependencies, each at the lowest release it allows."""

from importlib.metadata import requires

needed = [line for line in requires("recur") or [] if "extra ==" not in line]
print(*(line.replace(">=", "==") for line in needed))
