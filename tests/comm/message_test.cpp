#include "zero/comm/message.h"

#include <catch2/catch.hpp>

using namespace ballast;

TEST_CASE("messages arrive complete, however their bytes are split") {
  const Message messages[] = {{Message::Kind::set, "key", std::string(3000, 'v')},
                              {Message::Kind::goodbye, "", ""},
                              {Message::Kind::failed, "", "reason"}};
  for (const std::size_t piece : {1u, 7u, 4096u}) {
    std::string wire;
    for (const Message& message : messages) {
      wire += to_wire(message);
    }
    Inbox inbox;
    std::vector<Message> arrived;
    for (std::size_t first = 0; first < wire.size(); first += piece) {
      inbox.add(std::string_view(wire).substr(first, piece));
      while (const auto message = inbox.next()) {
        arrived.push_back(*message);
      }
    }
    CHECK(arrived == std::vector<Message>(std::begin(messages), std::end(messages)));
  }
}

TEST_CASE("bytes of another program are refused") {
  Inbox inbox;
  inbox.add("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
  CHECK_THROWS_WITH(inbox.next(), Catch::Contains("B3303"));
}
