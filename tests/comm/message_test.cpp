#include "zero/comm/message.h"

#include <catch2/catch.hpp>

#include "kernels/runtime/system_files.h"

using namespace ballast;

TEST_CASE("messages arrive complete, however their bytes are split") {
  const Message messages[] = {{Message::Kind::shared, "key", std::string(3000, 'v')},
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

TEST_CASE("a message of more bytes than expected is refused when its first bytes arrive") {
  Inbox inbox(max_hello_bytes);
  inbox.add(to_wire({Message::Kind::hello, "job", std::string(max_hello_bytes + 1, 'x')}).substr(0, 16));
  CHECK_THROWS_WITH(inbox.next(), Catch::Contains("B3303"));
}

TEST_CASE("malformed values of other processes are refused") {
  const std::vector<std::string> values{"", std::string("1:\0 2", 5), "x"};
  CHECK(split(join(values)) == values);
  for (const std::string joined : {"3", "3:ab", "x:ab", "-1:a", "18446744073709551615:a", ":", "1:a2:b"}) {
    CAPTURE(joined);
    CHECK_THROWS_WITH(split(joined), Catch::Contains("B3303") && Catch::Contains("malformed"));
  }
  CHECK(whole_number<std::size_t>("12") == 12);
  for (const std::string word : {"", "zz", "-1", "1 ", "0x1", "99999999999999999999"}) {
    CHECK(whole_number<std::size_t>(word) == std::nullopt);
  }
}
