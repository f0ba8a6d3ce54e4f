#include "examples/llama/tokens.h"

#include <ballast/error.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "examples/llama/noise.h"

namespace ballast::llama {
namespace {

constexpr std::size_t header_bytes = 1024;

struct Layout {
  std::size_t first_byte = 0;
  std::size_t width = 1;
  std::size_t count = 0;
};

Layout layout_of(const std::filesystem::path& path, std::span<const std::byte> bytes) {
  if (path.extension() != ".bin") return {.count = bytes.size()};
  std::int32_t header[8] = {};
  if (bytes.size() >= header_bytes) std::memcpy(header, bytes.data(), sizeof header);
  if (header[0] == 20240520 || header[0] == 20240801)  // llm.c, for GPT-2 and for Llama 3
    return {header_bytes, header[0] == 20240520 ? 2u : 4u, static_cast<std::size_t>(header[2])};
  if (std::memcmp(header, "BIN.TOK\n", 8) == 0)  // llmq; masks may follow the tokens
    return {header_bytes, static_cast<std::size_t>(header[3]), static_cast<std::size_t>(header[4])};
  return {.width = 2, .count = bytes.size() / 2};
}

}  // namespace

TokenFiles::TokenFiles(const std::vector<std::filesystem::path>& paths) {
  for (const std::filesystem::path& path : paths)
    add(path);
}

void TokenFiles::add(const std::filesystem::path& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat found {};
  const auto check = [&](bool holds) {
    require(holds, Code::bad_argument, [&] {
      return Problem{.what = std::string("cannot read a file of tokens: ") + std::strerror(errno),
                     .where = path.string(),
                     .needed = "a file that this user can read"};
    });
  };
  check(file >= 0 && fstat(file, &found) == 0);
  const auto size = static_cast<std::size_t>(found.st_size);
  void* const mapped = size > 0 ? mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0) : nullptr;
  close(file);
  check(mapped != MAP_FAILED);
  const std::shared_ptr<const std::byte> memory(static_cast<const std::byte*>(mapped), [size](const std::byte* all) {
    if (all != nullptr) munmap(const_cast<std::byte*>(all), size);
  });
  const Layout layout = layout_of(path, {memory.get(), size});
  const bool fits = (layout.width == 1 || layout.width == 2 || layout.width == 4) && layout.first_byte <= size &&
                    layout.count <= (size - layout.first_byte) / layout.width;
  require(fits, Code::bad_argument, [&] {
    return Problem{.what = "cannot read a file of tokens: it is shorter than its header says, or of another format",
                   .where = path.string(),
                   .needed = std::to_string(layout.count) + " tokens of 2 or 4 bytes",
                   .available = std::to_string(size) + " bytes"};
  });
  files_.push_back({{memory, memory.get() + layout.first_byte}, layout.width});
  first_.push_back(first_.back() + layout.count);
}

std::vector<std::uint32_t> TokenFiles::read(std::size_t first, std::size_t count) const {
  std::vector<std::uint32_t> tokens(count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto next = std::ranges::upper_bound(first_, first + i);
    const auto number = static_cast<std::size_t>(next - first_.begin()) - 1;
    const File& file = files_.at(number);
    std::memcpy(&tokens[i], file.memory.get() + (first + i - first_[number]) * file.width, file.width);
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
