# Refuses systems and compilers with which Ballast cannot be built, before they fail with a less clear message.

if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
  message(FATAL_ERROR "Ballast is built on Linux only, not on ${CMAKE_SYSTEM_NAME}: its drive tier and its ranks use Linux's "
    "own calls. On other systems use a Linux container or virtual machine (Windows: WSL 2).")
endif()

set(ballast_needs_GNU 12)
set(ballast_needs_Clang 14)
set(ballast_needed ${ballast_needs_${CMAKE_CXX_COMPILER_ID}})
if(ballast_needed AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS ballast_needed)
  message(FATAL_ERROR "Ballast needs GCC 12, Clang 14, or a newer one; ${CMAKE_CXX_COMPILER} is ${CMAKE_CXX_COMPILER_ID} "
    "${CMAKE_CXX_COMPILER_VERSION}. Choose another with -DCMAKE_CXX_COMPILER=g++-12, in a new build folder.")
endif()
