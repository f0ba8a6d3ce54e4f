#include "zero/comm/texts.h"

#include <sstream>

namespace ballast {
namespace {

void send(Communicator& world, std::string& text, std::size_t root) {
  if (text.empty()) return;
  world.broadcast(View(reinterpret_cast<std::byte*>(text.data()), text.size(), DType::u8), root);
}

}  // namespace

std::vector<std::string> texts_of_all(Communicator& world, const std::string& mine) {
  std::vector<std::int64_t> bytes(world.size());
  bytes[world.rank()] = static_cast<std::int64_t>(mine.size());
  world.all_reduce(bytes);
  std::vector<std::string> texts(world.size());
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    texts[rank] = rank == world.rank() ? mine : std::string(static_cast<std::size_t>(bytes[rank]), '\0');
    send(world, texts[rank], rank);
  }
  return texts;
}

std::string broadcast_text(Communicator& world, const std::string& mine, std::size_t root) {
  std::int64_t bytes = world.rank() == root ? static_cast<std::int64_t>(mine.size()) : 0;
  world.all_reduce({&bytes, 1});
  std::string text = world.rank() == root ? mine : std::string(static_cast<std::size_t>(bytes), '\0');
  send(world, text, root);
  return text;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);)
    lines.push_back(line);
  return lines;
}

}  // namespace ballast
