# Writes into FILE the commit that SOURCE is at, where that is not what it holds already:
#   cmake -D SOURCE=… -D FILE=… -P cmake/commit.cmake
# A tree without git says what `git archive` wrote into cmake/commit.txt.
cmake_minimum_required(VERSION 3.25)
file(READ ${SOURCE}/cmake/commit.txt archived)
string(STRIP "${archived}" commit)
if(NOT commit MATCHES "^[0-9a-f]+$")
  set(commit unknown)
endif()
if(EXISTS ${SOURCE}/.git)  # a repository around ours has other commits
  execute_process(COMMAND git -C ${SOURCE} rev-parse HEAD OUTPUT_VARIABLE head OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
  if(NOT failed)
    set(commit ${head})
    execute_process(COMMAND git -C ${SOURCE} diff --quiet HEAD -- RESULT_VARIABLE changed ERROR_QUIET)
    if(changed)
      string(APPEND commit "+")
    endif()
  endif()
endif()
file(CONFIGURE OUTPUT ${FILE} CONTENT "#define SCOPE_COMMIT \"@commit@\"\n" @ONLY)
