// Loops of another kind are refused.
// RUN: gossamer-opt %s -p parallelize --split-input-file --verify-diagnostics

// Two dimensions.
// expected-error @unknown {{needs one dimension from 0, in steps of 1, and no results}}
func.func @square(%x: memref<?x?xf32>, %v: f32, %n: index, %threads: index) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  scf.parallel (%i, %j) = (%c0, %c0) to (%n, %n) step (%c1, %c1) {
    memref.store %v, %x[%i, %j] : memref<?x?xf32>
    scf.reduce
  }
  return
}

// -----

// Every second number.
// expected-error @unknown {{needs one dimension from 0, in steps of 1, and no results}}
func.func @second(%x: memref<?xf32>, %v: f32, %n: index, %threads: index) {
  %c0 = arith.constant 0 : index
  %c2 = arith.constant 2 : index
  scf.parallel (%i) = (%c0) to (%n) step (%c2) {
    memref.store %v, %x[%i] : memref<?xf32>
    scf.reduce
  }
  return
}

// -----

// A result.
// expected-error @unknown {{needs one dimension from 0, in steps of 1, and no results}}
func.func @sum(%x: memref<?xf32>, %n: index, %threads: index) -> f32 {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %zero = arith.constant 0.0 : f32
  %total = scf.parallel (%i) = (%c0) to (%n) step (%c1) init (%zero) -> f32 {
    %0 = memref.load %x[%i] : memref<?xf32>
    scf.reduce(%0 : f32) {
    ^bb0(%a: f32, %b: f32):
      %1 = arith.addf %a, %b : f32
      scf.reduce.return %1 : f32
    }
  }
  return %total : f32
}
