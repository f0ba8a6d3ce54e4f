#include "examples/gpt/text.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string_view>

#include "examples/gpt/noise.h"

namespace ballast::gpt {
namespace {

// Returns words in a somewhat predictable order, so that the loss falls.
std::vector<std::uint8_t> made_up() {
  constexpr std::string_view words[] = {"a ship", "the sea", "takes on", "drops", "ballast", "in a storm", "at night"};
  std::vector<std::uint8_t> bytes;
  for (std::uint64_t i = 0; bytes.size() < 64 * 1024; ++i) {
    const std::string_view word = words[noise({i, 1}) % 4 == 0 ? noise({i, 2}) % std::size(words) : i % 5];
    bytes.insert(bytes.end(), word.begin(), word.end());
    bytes.push_back(i % 9 == 8 ? '\n' : ' ');
  }
  return bytes;
}

}  // namespace

Text::Text(const std::vector<std::filesystem::path>& files) {
  for (const std::filesystem::path& path : files) {
    std::ifstream file(path, std::ios::binary);
    require(file.good(), Code::bad_argument, [&] {
      return Problem{.what = fmt::format("cannot read {}: {}", path.string(), std::strerror(errno)),
                     .needed = "a file that this user can read"};
    });
    bytes_.insert(bytes_.end(), std::istreambuf_iterator<char>(file), {});
  }
  if (files.empty()) bytes_ = made_up();
}

std::vector<std::uint8_t> Text::draw(const Draw& which, std::size_t count, std::size_t length) const {
  require(length <= bytes_.size(), Code::bad_argument, [&] {
    return Problem{.what = "cannot train: the text is shorter than a sequence",
                   .needed = fmt::format("{} bytes", length),
                   .available = fmt::format("{} bytes", bytes_.size()),
                   .remedy = "name more files, or choose a shorter context"};
  });
  std::vector<std::uint8_t> drawn;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t number = noise({which.seed, which.step, which.micro_step, which.rank, i});
    const auto begin = bytes_.begin() + static_cast<std::ptrdiff_t>(number % (bytes_.size() - length + 1));
    drawn.insert(drawn.end(), begin, begin + static_cast<std::ptrdiff_t>(length));
  }
  return drawn;
}

}  // namespace ballast::gpt
