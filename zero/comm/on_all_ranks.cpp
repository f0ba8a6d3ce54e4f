#include "zero/comm/on_all_ranks.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <optional>
#include <sstream>

#include "zero/comm/message.h"

namespace ballast {
namespace {

// The bytes of a text, or of numbers.
template <class Values>
View view_of(Values& values) {
  const auto bytes = std::as_writable_bytes(std::span(values));
  return {bytes.data(), bytes.size(), DType::u8};
}

void broadcast_from(Communicator& world, std::string& text, std::size_t root) {
  if (!text.empty()) world.broadcast(view_of(text), root);
}

struct Failure {
  Code code = Code::internal;
  Problem problem{};
};

std::optional<Failure> failure_of(const std::function<void()>& work) {
  try {
    work();
    return {};
  } catch (const Error& error) {
    return Failure{error.code(), error.problem()};
  } catch (const std::filesystem::filesystem_error& error) {
    return Failure{Code::file_call, {.what = error.code().message(), .where = error.path1().string()}};
  } catch (const std::exception& error) {
    return Failure{Code::internal, {.what = error.what()}};
  }
}

std::string to_text(const Failure& failure) {
  const auto& [what, where, needed, available, remedy] = failure.problem;
  return join({std::to_string(static_cast<int>(failure.code)), what, where, needed, available, remedy});
}

Failure failure_from(const std::string& text) {
  const std::vector<std::string> fields = split(text);
  return {static_cast<Code>(std::stoi(fields.at(0))),
          {fields.at(1), fields.at(2), fields.at(3), fields.at(4), fields.at(5)}};
}

// Values of the first name in which a rank differs from rank 0, or of a place that one of them lacks.
struct OtherValue {
  std::size_t rank = 0;
  NamedValue here;  // on rank 0
  NamedValue there;
};

std::optional<OtherValue> first_other_value(Communicator& world, const std::vector<NamedValue>& mine) {
  std::vector<std::string> words;
  for (const auto& [name, value] : mine)
    words.insert(words.end(), {name, value});
  const std::string text = join(words);
  std::vector<std::int64_t> digests(world.size());
  digests[world.rank()] = static_cast<std::int64_t>(std::hash<std::string>()(text));
  if (world.size() > 1) world.all_reduce(digests);
  if (std::ranges::count(digests, digests.front()) == std::ssize(digests)) return {};
  const std::vector<std::string> ranks = texts_of_all(world, text);
  const std::vector<std::string> first = split(ranks.front());
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    const std::vector<std::string> theirs = split(ranks[rank]);
    const auto place = static_cast<std::size_t>(std::ranges::mismatch(first, theirs).in1 - first.begin()) / 2 * 2;
    const auto value_in = [&](const std::vector<std::string>& of) {
      return place < of.size() ? NamedValue{of[place], of[place + 1]} : NamedValue{"", "nothing"};
    };
    if (first != theirs) return OtherValue{rank, value_in(first), value_in(theirs)};
  }
  return {};
}

}  // namespace

std::vector<std::string> texts_of_all(Communicator& world, const std::string& mine) {
  std::vector<std::uint64_t> own_bytes{mine.size()}, bytes(world.size());
  world.all_gather(view_of(own_bytes), view_of(bytes));
  std::vector<std::string> texts;
  texts.reserve(bytes.size());
  for (const std::uint64_t each : bytes)
    texts.emplace_back(each, '\0');
  texts[world.rank()] = mine;
  std::vector<SentPart> sent;
  std::vector<ReceivedPart> received;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (rank == world.rank()) continue;
    sent.push_back({rank, view_of(texts[world.rank()])});
    received.push_back({rank, view_of(texts[rank])});
  }
  try {
    world.exchange(sent, received);
  } catch (const Error& error) {
    // Communicators of other libraries need not have exchange(), and refuse it before they send anything.
    if (error.code() != Code::unsupported) throw;
    for (std::size_t rank = 0; rank < texts.size(); ++rank)
      broadcast_from(world, texts[rank], rank);
  }
  return texts;
}

std::string broadcast_text(Communicator& world, const std::string& mine, std::size_t root) {
  std::int64_t bytes = world.rank() == root ? static_cast<std::int64_t>(mine.size()) : 0;
  world.all_reduce({&bytes, 1});
  std::string text = world.rank() == root ? mine : std::string(static_cast<std::size_t>(bytes), '\0');
  broadcast_from(world, text, root);
  return text;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);)
    lines.push_back(line);
  return lines;
}

void on_all_ranks(Communicator& world, const std::function<void()>& work) {
  if (world.size() == 1) return work();
  const std::optional<Failure> own = failure_of(work);
  const std::string text = own ? to_text(*own) : std::string();
  std::vector<std::int64_t> bytes(world.size());  // bytes of each rank's message
  bytes[world.rank()] = static_cast<std::int64_t>(text.size());
  world.all_reduce(bytes);
  const auto first = std::ranges::find_if(bytes, [](std::int64_t each) { return each > 0; });
  if (first == bytes.end()) return;
  const auto rank = static_cast<std::size_t>(first - bytes.begin());
  Failure failure = failure_from(broadcast_text(world, text, rank));
  std::string& where = failure.problem.where;
  where = where.empty() ? fmt::format("rank {}", rank) : fmt::format("rank {}: {}", rank, where);
  fail(failure.code, failure.problem);
}

void require_same_options(Communicator& world, const std::vector<NamedValue>& mine) {
  const auto other = first_other_value(world, mine);
  require(!other, Code::bad_argument, [&] {
    const auto& [rank, here, there] = *other;
    const std::string& name = here.first.empty() ? there.first : here.first;
    return Problem{.what = fmt::format("cannot train: rank {} has another {} than rank 0", rank, name),
                   .where = fmt::format("{} is {} on rank {}, and {} on rank 0", name,
                                        there.first == name ? there.second : "nothing", rank, here.second),
                   .needed = "the same optimizer and the same options on all ranks"};
  });
}

void require_same_parameters(Communicator& world, const std::vector<std::string>& mine) {
  std::vector<NamedValue> values;
  values.reserve(mine.size());
  for (const std::string& line : mine)
    values.emplace_back("", line);
  const auto other = first_other_value(world, values);
  require(!other, Code::bad_argument, [&] {
    const auto& [rank, here, there] = *other;
    return Problem{
        .what = fmt::format("cannot train: rank {} has other parameters than rank 0, or another order of them", rank),
        .where = fmt::format("{} on rank {}, and {} on rank 0", there.second, rank, here.second),
        .needed = "the same parameters and parameter groups in the same order on all ranks",
        .remedy =
            "Make lists of parameters from model.parameters(), or sort them by name. A set of parameters has "
            "another order in each process."};
  });
}

}  // namespace ballast
