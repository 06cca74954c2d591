// The input is standard input if the file is `-` or not named at all; `-o` writes a file and leaves standard output empty.
// RUN: gossamer-opt < %s | filecheck %s
// RUN: gossamer-opt - -p cse -o %t.mlir < %s > %t.out
// RUN: test ! -s %t.out
// RUN: filecheck %s --input-file %t.mlir

// CHECK: func.func @f()
func.func @f() {
  return
}
