"""Exit with 2 and one line where no Ray dashboard answers at an address, or where it refuses the token.

cluster/submit.sh asks first, since `ray job submit` needs ten seconds to show a traceback. The machine that submits need have
neither Ray nor what this package needs.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from trial_ray.errors import TrialRayError
from trial_ray.runs.dashboard import Dashboard

if __name__ == "__main__":
    try:
        Dashboard(sys.argv[1]).version()
    except TrialRayError as error:
        print(f"cluster/submit.sh: {error}", file=sys.stderr)
        sys.exit(2)
