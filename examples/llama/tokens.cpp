#include "examples/llama/tokens.h"

#include <ballast/error.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "examples/llama/noise.h"

namespace ballast::llama {
namespace {

constexpr std::size_t header_bytes = 1024;

// Reads up to so many bytes from a place on; fewer where the file ends.
std::vector<char> read_bytes(const std::filesystem::path& path, std::size_t first, std::size_t count) {
  std::vector<char> bytes(count);
  std::ifstream file(path, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(first)).read(bytes.data(), static_cast<std::streamsize>(count));
  require(file.is_open() && !file.bad(), Code::bad_argument, [&] {
    return Problem{.what = std::string("cannot read a file of tokens: ") + std::strerror(errno),
                   .where = path.string(),
                   .needed = "a file that this user can read"};
  });
  bytes.resize(static_cast<std::size_t>(file.gcount()));
  return bytes;
}

}  // namespace

TokenFiles::TokenFiles(const std::vector<std::filesystem::path>& paths) {
  for (const std::filesystem::path& path : paths) {
    File file = open(path);
    file.first = size();
    files_.push_back(file);
  }
}

TokenFiles::File TokenFiles::open(const std::filesystem::path& path) {
  std::int32_t header[8] = {};
  const std::vector<char> begin = read_bytes(path, 0, header_bytes);
  const std::size_t size = std::filesystem::file_size(path);
  File file{.path = path, .count = size};
  if (path.extension() == ".bin") {
    file.width = 2;
    file.count = size / 2;
    if (begin.size() == header_bytes) std::memcpy(header, begin.data(), sizeof header);
    if (header[0] == 20240520 || header[0] == 20240801)  // llm.c, for GPT-2 and for Llama 3
      file = {path, header_bytes, header[0] == 20240520 ? 2u : 4u, static_cast<std::size_t>(header[2])};
    if (std::memcmp(header, "BIN.TOK\n", 8) == 0)  // llmq; masks may follow the tokens
      file = {path, header_bytes, static_cast<std::size_t>(header[3]), static_cast<std::size_t>(header[4])};
  }
  const bool fits = (file.width == 1 || file.width == 2 || file.width == 4) && file.first_byte <= size &&
                    file.count <= (size - file.first_byte) / file.width;
  require(fits, Code::bad_argument, [&] {
    return Problem{.what = "cannot read a file of tokens: it is shorter than its header says, or of another format",
                   .where = path.string(),
                   .needed = std::to_string(file.count) + " tokens of 2 or 4 bytes",
                   .available = std::to_string(size) + " bytes"};
  });
  return file;
}

std::vector<std::uint32_t> TokenFiles::read(std::size_t first, std::size_t count) const {
  std::vector<std::uint32_t> tokens;
  for (const File& file : files_) {
    const std::size_t begin = std::max(first, file.first), end = std::min(first + count, file.first + file.count);
    if (begin >= end) continue;
    const std::size_t first_byte = file.first_byte + (begin - file.first) * file.width;
    const std::vector<char> bytes = read_bytes(file.path, first_byte, (end - begin) * file.width);
    for (std::size_t i = 0; i + file.width <= bytes.size(); i += file.width)
      std::memcpy(&tokens.emplace_back(), &bytes[i], file.width);
  }
  return tokens;
}

std::vector<std::uint32_t> TokenFiles::draw(std::uint64_t key, std::size_t sequences, std::size_t length) const {
  require(length <= size(), Code::bad_argument, [&] {
    return Problem{.what = "cannot train: the text is shorter than a sequence",
                   .needed = std::to_string(length) + " tokens",
                   .available = std::to_string(size()),
                   .remedy = "name more files, or choose a shorter context"};
  });
  std::vector<std::uint32_t> drawn;
  for (std::uint64_t i = 0; i < sequences; ++i) {
    const std::vector<std::uint32_t> sequence = read(noise({key, i}) % (size() - length + 1), length);
    drawn.insert(drawn.end(), sequence.begin(), sequence.end());
  }
  return drawn;
}

}  // namespace ballast::llama
