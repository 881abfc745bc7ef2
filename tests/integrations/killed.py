"""Train on two ranks until one is killed in the middle of a save, or go on after that.

    torchrun --nproc-per-node 2 -m tests.integrations.killed FOLDER STEP

Rank 1 kills itself with signal 9 while it saves after STEP; 0 lets it live. The run goes on from the last
complete checkpoint in FOLDER, if there is one. At its end rank 0 writes FOLDER/losses.json.
"""

import json
import os
import signal
import sys
from pathlib import Path

from tests.integrations.runs import logged, trainer

OPTIONS = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}


def main(folder, last_step):
    ours = trainer(folder, {}, **OPTIONS)
    save = ours._save_rng_state

    def save_or_die(output_dir):
        if ours.state.global_step == last_step and ours.args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        save(output_dir)

    ours._save_rng_state = save_or_die
    ours.train(resume_from_checkpoint=any(Path(folder).glob("checkpoint-*")))
    if ours.args.process_index == 0:
        Path(folder, "losses.json").write_text(json.dumps(logged(ours)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
