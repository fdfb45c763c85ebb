"""The `vllm` command where sound files can be read: what a server that transcribes is a fork of."""

from vllm.entrypoints.cli.main import main
from vllm.multimodal.media import audio

from tests.support.sounds import soundfile

audio.soundfile = soundfile

if __name__ == "__main__":
    main()
