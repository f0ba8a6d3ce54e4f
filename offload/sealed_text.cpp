#include "offload/sealed_text.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <fstream>
#include <span>
#include <sstream>
#include <system_error>

#include "offload/checksum.h"
#include "offload/file.h"

namespace ballast::offload {
namespace {

constexpr std::uintmax_t most_bytes = std::uintmax_t{256}
                                      << 20;  // of a text that is read; a description has a few KiB a unit

std::string seal_of(std::string_view text) {
  return fmt::format("seal {:016x}\n", checksum(std::as_bytes(std::span(text))));
}

void write_all(const File& file, std::string_view text) {
  std::size_t written = 0;
  while (written < text.size()) {
    const ssize_t more =
        ::pwrite(file.descriptor(), text.data() + written, text.size() - written, static_cast<off_t>(written));
    if (more < 0 && errno != EINTR) fail_file("write", file.path(), written, errno);
    if (more > 0) written += static_cast<std::size_t>(more);
  }
  if (::fsync(file.descriptor()) != 0) fail_file("fsync", file.path(), 0, errno);
}

}  // namespace

void write_sealed_text(const std::filesystem::path& path, std::string_view text) {
  const std::filesystem::path unfinished = path.string() + ".unfinished";
  std::error_code none_there;
  std::filesystem::remove(unfinished, none_there);  // left by a killed process
  File file(unfinished, {.create = true, .direct = false, .allow_network = true});
  write_all(file, std::string(text) + seal_of(text));
  file.rename(path);
  flush_directory(path.parent_path());
}

std::optional<std::string> read_sealed_text(const std::filesystem::path& path) {
  std::error_code missing;
  if (std::filesystem::file_size(path, missing) > most_bytes || missing) return {};
  std::ifstream file(path, std::ios::binary);
  std::ostringstream bytes;
  bytes << file.rdbuf();  // which ends where the drive cannot read on; an iterator would throw
  std::string text = bytes.str();
  const std::size_t seal_bytes = seal_of("").size();
  if (text.size() < seal_bytes) return {};
  const std::string seal = text.substr(text.size() - seal_bytes);
  text.resize(text.size() - seal_bytes);
  if (seal != seal_of(text)) return {};
  return text;
}

}  // namespace ballast::offload
