"""The codec of the data that a run reads."""

from shardwright_data.loader.config import DataConfig
from shardwright_data.text.codec import TextCodec, codec_of_dataset
from shardwright_data.text.tokenizers import open_tokenizer


def codec_of_data(data: DataConfig) -> TextCodec:
    """The codec of the data that a run reads. The sources of a mixture share one.

    Raises:
        ValueError: the dataset or its tokenizer is missing, or there is no dataset, as in an import.
    """
    if data.stream is not None:
        return TextCodec(open_tokenizer(data.stream.tokenizer_kind, data.stream.tokenizer), data.stream.end_token)
    filespecs = [source.filespec for source in data.mixture.values()] or [data.filespec]
    if filespecs[0] is None:
        raise ValueError("the run has no data, as it was imported")
    return codec_of_dataset(filespecs[0])
