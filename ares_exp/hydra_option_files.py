"""How Hydra reads the files of the config tree: what is wrong with one is said with its name."""

from __future__ import annotations

from pathlib import Path

from hydra._internal.core_plugins import file_config_source
from hydra.plugins.config_source import ConfigResult

from ares_exp.errors import ConfigError
from ares_exp.record_files import MAX_YAML_BYTES


class FileConfigSource(file_config_source.FileConfigSource):
    """Hydra's own, which says of some files neither which it was nor that it is too long."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Reads a file of the tree.

        Raises:
            ConfigError: It is too long, too deep, or not in UTF-8.
            yaml.YAMLError: It is no YAML; this names the file itself.
        """
        path = Path(self.path, self._normalize_file_name(config_path))
        if path.is_file() and (size := path.stat().st_size) > MAX_YAML_BYTES:
            raise ConfigError(
                f"Expected the config file {path} to have at most {MAX_YAML_BYTES:,} bytes, got {size:,}."
            )
        try:
            return super().load_config(config_path)
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"Expected the config file {path} to be in UTF-8, found the byte {error.object[error.start]:#04x}. "
                "Save it as UTF-8, or choose another file."
            ) from error
        except RecursionError as error:
            raise ConfigError(f"The config file {path} is nested too deeply to be read.") from error


def read_option_files() -> None:
    """Has Hydra read files in this way, in this process."""
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.plugins import Plugins

    Plugins.instance()  # registers Hydra's own: a class of the same name does not take the place of another
    SourcesRegistry.instance().types[FileConfigSource.scheme()] = FileConfigSource
