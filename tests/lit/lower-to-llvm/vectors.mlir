// Loops, vectors and memrefs become the LLVM dialect, with the width of vectors noted on every function that has a body.
// RUN: gossamer-opt %s -p 'lower-to-llvm{bits=256}' --split-input-file | filecheck %s
// RUN: gossamer-opt %s -p 'lower-to-llvm{bits=256 bf16=true}' --split-input-file | filecheck %s --check-prefix=BF16

// A masked load and a fused multiply-add are one operation each; erf of f64 is a call per element.
// CHECK:       llvm.func @erf(f64) -> f64
// CHECK-NOT:     passthrough
// CHECK-LABEL: llvm.func @loop(%arg0: !llvm.ptr, %arg1: !llvm.ptr, %arg2: i64, %arg3: i64, %arg4: i64, %arg5: i64
// CHECK-SAME:    passthrough = {{\[\[}}"prefer-vector-width", "256"], "noinline"]
// CHECK:         llvm.cond_br
// CHECK:         llvm.intr.masked.load
// CHECK:         llvm.intr.fmuladd
// CHECK-COUNT-4: llvm.call @erf(
// CHECK-NOT:     unrealized_conversion_cast
// BF16-LABEL: llvm.func @loop(
func.func @loop(%x: memref<?xf64>, %n: index) -> vector<4xf64> {
  %c0 = arith.constant 0 : index
  %c4 = arith.constant 4 : index
  %zero = arith.constant dense<0.0> : vector<4xf64>
  %total = scf.for %i = %c0 to %n step %c4 iter_args(%sum = %zero) -> vector<4xf64> {
    %left = arith.subi %n, %i : index
    %mask = vector.create_mask %left : vector<4xi1>
    %v = vector.maskedload %x[%i], %mask, %zero : memref<?xf64>, vector<4xi1>, vector<4xf64> into vector<4xf64>
    %next = vector.fma %v, %v, %sum : vector<4xf64>
    scf.yield %next : vector<4xf64>
  }
  %0 = math.erf %total : vector<4xf64>
  return %0 : vector<4xf64>
}

// -----

// Rounding to bf16 is spelled out in integers, to nearest even and NaN to NaN, unless the target has an instruction for it.
// CHECK-LABEL: llvm.func @round(
// CHECK-NOT:     llvm.fptrunc
// CHECK:         llvm.fcmp "une"
// CHECK:         llvm.lshr
// CHECK:         llvm.select
// BF16-LABEL: llvm.func @round(
// BF16:         llvm.fpext %{{.*}} : vector<4xbf16> to vector<4xf32>
// BF16:         llvm.fptrunc %{{.*}} : vector<4xf32> to vector<4xbf16>
func.func @round(%x: vector<4xbf16>) -> vector<4xbf16> {
  %0 = arith.extf %x : vector<4xbf16> to vector<4xf32>
  %1 = arith.addf %0, %0 : vector<4xf32>
  %2 = arith.truncf %1 : vector<4xf32> to vector<4xbf16>
  return %2 : vector<4xbf16>
}
