"""The grids of the IQ formats: sets of points that weights are rounded to, as data.

A grid is a set of points of 8 (or 4) coordinates, each one of a few values. The codes of a point's
coordinates, first one lowest, make a number; a format counts the points in the order of these numbers.
So a grid is one bit for each number there is: compressed, then written in base 85.

The points: ggml-common.h of https://github.com/ggml-org/llama.cpp (MIT).
"""

from __future__ import annotations

import base64
import zlib
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Grid(NamedTuple):
    """Points of `size` coordinates, each one of `values`; `points` is the packed set."""

    values: tuple[int, ...]
    size: int
    points: str


@cache
def grid(name: Grid) -> NDArray[np.float32]:
    """The points as rows: [points, coordinates]."""
    present = np.frombuffer(zlib.decompress(base64.b85decode(name.points)), np.uint8)
    numbers = np.flatnonzero(np.unpackbits(present, bitorder="little"))
    width = (len(name.values) - 1).bit_length()
    codes = (numbers[:, None] >> np.arange(0, width * name.size, width)) & ((1 << width) - 1)
    return np.array(name.values, np.float32)[codes]


IQ2_XXS = Grid(
    (8, 25, 43),
    8,
    "c-rk)U6O+!49=H<cZL(xhrNgQKh=VwA}bWdcD2nn?G)N3A^*W2ZAoh)OMoRJt%%%fhNW)!MA(~UIlz&w{vWSv;N;RE7b9c8H!=V4"
    "eeXBy*Su!HNYA&Te})dDMt0DI673dV$k3}@(yj*^EQ;_p!QT^rNq4B69lQk|2jzSIUGQy&KT5HMF*2I;kA-j=A5=KdIuLK^f2|fD"
    "a>(aR)iMd7Pl&&gA7j7NWg2z{U`lZ;pYL4-1mB9O?*skZf75J=bFlkU8p5xResAin`^zkk_jFja>z}Rj34d^5zImK>qW1z|M&ggH"
    "x~8gYU27lIsrxIX9jm}@`r#T5cvS%YGfX`Hl!mYTgohSWbUWkWRee^GK=6H-=6}xQfytMKQ|f*Ed;x{x(&s7wQ<1(k@1NHjzP0~N"
    "c;14nMtxPgJAD5SKDdgV`SV(QW&C5?k9_KF`@$0x<X$fj2m}IwKp^;d`~q5Z2cG",
)

IQ2_XS = Grid(
    (8, 25, 43),
    8,
    "c-rk)L9)Xj2n9y>PEU|5dJm7#>HQD$jn$|`P4#z?%<vXzH4z2mAwKn+o(Ql#9{}K<<eEENzYhI??uC0o4&M)3|LWVQU<hg6caYPP"
    "k3gGzHh$~3?pKGl8Jiw9?beSRFB+K+aXoQfqH?_dzF3q!tntdo{O<Mc+5e;Os~n%%XGZT`zT0)C;a}*;#^`aH)Bh26PLyNW`?c_F"
    "4^;hob!__|nVqp_fA_Og?GK<>dt@Vc`PB1oG^wgum&)nC@Dr1-;~dLAVUxmY%3;}~GzbLu<NuTgyZpbhc=!BCFrD+_c_Z<UIq(C^"
    "3q^RwTx}*-kn}RuxW_;@Ch!!8xw-%Ox$c;MKN(P;@N;1YHD-Ux@(wYAM^3lc$-Fq8e&c?lq&Xk1dirxLH}iiUcPi#iI{LQ<Q}}$W"
    "0Kn61jfZpCFJq3r*tb2O+H6${1cDp#e^&QtMs}&bBWguw&Jnu7(QW>DmU8Gkzby4nU?u>wx+d{Fj@1%H{eu?nbODg~-&VObukZT2"
    "Yo}`8b(h`QHHA!l{>eWxfgPG)8OoJcgVx78ySg4J{&V|ib^$PZ4}?EBK`k?GP(g>r8I$k%SJjATHxdGYKp+qZ1OmY|@CTCx68!",
)

IQ2_S = Grid(
    (8, 25, 43),
    8,
    "c-rk)NwS0>3=OHcr#OKuxQA!({)hR3C=lX+f74X)7FL58$V<r3Zd%bP0RLPOz$pWk;Dnzy;OAGg+d2adOnM#GEAs1X7+cbieg24Z"
    "Uw@7;wyKan?fa&4Z2J}8$9>~``Suw>FG}()Xvh`V^i`P2M<!owD`?t(MIdy9z<=Z+_yN@XJH~$wv+=+4W+Go7_`kJpInU*DyN4&W"
    "=x>94lYD-@On$U%E?%GeF3=+m|M&M=dp)S~|Dd)5nSX!xz5gFPz?5Hwcl^J#?;?oK?EdNARenpr^yfRy<&e^Heds?h&`<oIR!I5R"
    "@c6Heye!9OpC5H`PaETpkY6t2Kh^iq3Gsh!*x#^y^`rddD*kjE|L^j9Q~t$v9-ib&_T~I9|KLB9PjH`KMDV;bcjgRhw77lk|E0cC"
    "{nL_&?F;)Jb%s>j)l};y{d0et1(9#-$$SaIz(6nY--HhO>~q0f=0{+C(BAKV>-+Nfk1g?^g!_x%L$1`fQXwB6>k3Mp4{slS9^StC"
    "F25&!=q`TdUoCC^*IHjG6ypEV9QkkR2Nd!PzO`y!m0<Y4j@8vfvR0D+Q|$lGaby2q*%wPYzVGWlW?ib!D_dI2zP;%?DMl2*z`(%3"
    "z`(%3z`#%9541rmBL",
)

IQ3_XXS = Grid(
    (4, 12, 20, 28, 36, 44, 52, 62),
    4,
    "c-l=-F%H5o3_M%0RAmZ7_lgPeigaLyA4Q!IuVCbv_?)J2Rn;aw-<^~BWtxCXwzFx0%xW)eST<YW5KL&L;j#hAAHoX-c)&}FY<X@1"
    "m|7IGsjrX>q7@bAuHrcP3L2_`6x)_>^v5;&o?@Fdagv_Uo9H*utGOGEJ93R6P|L2rgx{U}Y-UnrS3sKYtPIbF!WdDS7|dsT<9UQC"
    "qzhJe8+4kK5km%XvHjm=J(sMgqk-e3v^zjTJayVggoDWMJzTWE4a0T)3l-9P!ydlNePrBA?Xny*@kmBo4W|8$?wEo20v5Uy_5",
)

IQ3_S = Grid(
    (1, 3, 5, 7, 9, 11, 13, 15),
    4,
    "c-k#d!AiqG5PdVu!e&pqA>uXNMyUCUt<-~hDT4SrX{pfmmf{D9Rs{Q#&TgE;z`Qr}-rMBob#A|%IbF{W(Id*&Lkwq!%0~0(%@Ao{"
    "OU0lD_x2OXCI^OquXIKLt}o^pYnG?L6&oz+9HeSVPSrN(A}t!YmF^Xmp*3Qy-5G8(e|b5Y-VC?q(AA>+32wuC)HmEXp@c1}PT|h8"
    "3}iuXSwt^ePGkv?U+Lf3a_=1ov?9@{igP&9v4ypFswx3&TJZ@M2_=SuX>*z&qp%+CoXl)ge8!drA@5Agyn!FG+()?*sDei}n1QT9"
    "5(J|p-wR7#Aht{0!Hx!aZfy;cl!bD4D3uqR(zW`GY5;6>@R{_|3X$jRqNR^eu)^e<Ll^vCYlKPU1;QQ+o$IB(hKom+bHx0SXmXXw"
    "yZnVo8~6jd#wQ>",
)

IQ1 = Grid(
    (-1, 0, 1),
    8,
    "c-rk)O>f&s4CQb>bQQe$0V7q)UL7O3%PMxys&d$?<8`{%LPqVsUy>umBRfH(_Ruvd0*O76ha!jM<D*KOgS7x2TKWU}?qxm55?aUC"
    "Yb;EwPQM#u_`L_j6nULvy#M<W^dWk)lr?>e?sniUklxJfu_V0+x$Q9CpUP?hrTU0$#{#E3{bYars{gEy?Lzp_Yi{u^|8rWGXZ!#E"
    "@`w1hfK07|e~`z~!BVl`-W)OG(}se6dl|nq7Pf)Q{P>>KxYRX$ZYipT;%MF_t0;nn=_KwQ9302}!R}o-%8!lZ{SS7lR|!C6iasOW"
    "ZGqU^VrCyh{+!ug8a|JE)w#@YBHXGv){hmi-wmBpE&FS8P0{E4Eu;J$)^YyxdEB74ovhcR{KpsksO9>wey?~sIo|h$@~7&b7v~=!"
    "TLzMyoF9O9w#9hA#U4LE)Aa_F`LX(6^z{#8`!V=mVF4`$|CgivF!JACUH#AUJIm1bfa<U9`)M8Bf5e>?T(g~{PE6=tLNeOl_isXK"
    "!Cg!z;Xi^$2>RjHaz7}gjt99V{Ab+laIYEv8HasTUpX!<_oq_*C-{&Pi)bhLpBuK<V5UNSkNf-9+$q+VnFBr>#(|w`NByOe|Ab;T"
    "^qpz`|7xMGYZij99eTz7dErqn=aY2$iTf`e6F&a}LOf30llJ$0x{&iMT{_|UOXzgY`rSS`kbXrxU=`^<;8FViQ6G~%CEm(~JQ(C3"
    "z0yZbaY~ND8+J)<cKZF#|3Yy`Bl)KvBo9i3XZh#h<bRHxj^mpuZ=N`B^i~(lPtDHaRn>p!zbQOPUq#AiKjMD{{LTL17B_TGDe<cj"
    "|LIpBVWU)xC-0WehBcIgFU;$f_|?V?-rFsPIPH<ozj9l*Q>XietY1^SGuzorF<Wc&r%4Q;!U4Zf>K|1V-6dWueg9t-^8SX<Vm0<("
    "tXU9$T(W(T+G=hqvs?}TANcDdzCQnkez?GA-3Sgeug<^F&k57{?=ZjTCe;0SdPC|@6<zs2eSc%aJX)PikYb<998X?Uzb2jJf3P=a"
    "`|;BLP0w%Wxzgu+j~AEoLwj}}SHu5wc)vre%3bmwo{Jg(GT2LhZ=g`)`76Yo=if^3vtclu@b)K@cq-HBKSlrjsQ+emkGYHbuR6GR"
    "J|%p{we;W5!e4IOJv2DQ{}9g_p5^`1Fvkr-e%VKPuhZeq$a^MJkM?^A{u7Uob$4a;|B}D>TK;-$UFedz4f+4q=yZ)G`t)=2Z>V3m"
    "vs(=p+@b38ig~A(IiOHy`77^d8naVY*!UB+KY)Mmmj8rDx$uL`1g5ioYyVZ&|17i2GRrKp%reU?zn6Ri;@yKI",
)
