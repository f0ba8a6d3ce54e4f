// A bounded search for bytes that a hub or a reader of a drive does not survive.
#include "tests/fuzz/messages.h"

#include <catch2/catch.hpp>

using namespace ballast;
using namespace ballast::testing;
using Kind = Message::Kind;

namespace {

constexpr std::size_t rounds = 3000;

std::string messages_of_a_rank() {
  std::string wire;
  for (const Message& message :
       {Message{Kind::share, "all/memory", to_line(Share{1, 3, "machine 100 7"})},
        Message{Kind::shared, "key", "value"}, Message{Kind::late, "", "2"},
        Message{Kind::waits, "all/memory", "0 1 2"}, Message{Kind::failed, "0 2", "reason"},
        Message{Kind::hello, "job", to_line(Member{1, 3, "node", 100, "here"})}, Message{Kind::goodbye, "", "done"}}) {
    wire += to_wire(message);
  }
  return wire;
}

}  // namespace

TEST_CASE("a hub survives damaged messages") {
  const std::string genuine = messages_of_a_rank();
  read_as_hub(genuine);
  CHECK_NOTHROW(for_mutants(rounds, [&](std::mt19937_64& random) { read_as_hub(mutant(genuine, random)); }));
}

TEST_CASE("damaged values of other processes are refused, or read right") {
  for (const std::string& genuine : {join({"a", "", std::string(20, 'x')}), to_line(Member{1, 3, "node", 100, "here"}),
                                     to_line(Share{1, 3, "value"}), std::string("0 2 11")}) {
    CHECK_NOTHROW(for_mutants(rounds, [&](std::mt19937_64& random) { read_as_text(mutant(genuine, random)); }));
  }
}
