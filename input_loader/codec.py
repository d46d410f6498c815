"""The codec of the data that a run reads."""

from input_loader.config import DataConfig
from text.codec import TextCodec, codec_of_dataset, open_tokenizer


def codec_of_data(data: DataConfig) -> TextCodec:
    """The codec of the data that a run reads. Of a mixture, whose sources share one tokenizer, that of the first.

    Raises:
        ValueError: the dataset or its tokenizer is missing.
    """
    if data.stream is not None:
        kind, name = data.stream.tokenizer_kind, data.stream.tokenizer
        return TextCodec(open_tokenizer(kind, name), data.stream.end_token)
    filespecs = [source.filespec for source in data.mixture.values()] or [data.filespec]
    return codec_of_dataset(filespecs[0])
